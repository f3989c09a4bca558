"""Vantages, the places that observe exchanges: relay, middleware, packets."""
