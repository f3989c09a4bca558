"""`llmtap bench exo` (rates over a grid, as exo-bench measures them) and `bench grid` (batch times)."""
