"""Runs sequences on workers: admission, placement, attempts and retries.

admission -> dispatcher -> reserve (placement over the workers) -> attempt -> tracked_request -> tokens
"""
