"""Terminal view of a running llmtap, which reads the admin port over HTTP."""
