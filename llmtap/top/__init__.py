"""Terminal view (`llmtap top`) of a running llmtap, which reads the admin port over HTTP."""
