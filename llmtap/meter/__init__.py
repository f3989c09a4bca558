"""The analysis plane: tap frames to Exchanges to windows, /metrics and the admin API."""
