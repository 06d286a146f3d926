"""Admission policy: tenants, the fair queue, the wait estimate and the rate limits. Pure; `dispatch` calls it."""
