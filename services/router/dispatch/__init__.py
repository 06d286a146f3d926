"""The lower half of the router: a job comes in at the door, tokens come out, whatever happens to workers in between.

admission -> dispatcher -> booking (placement over the fleet, promise) -> attempt (conversation) -> journey -> tokens
"""
