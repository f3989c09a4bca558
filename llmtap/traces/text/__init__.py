"""Text files of traces: lines, CSV, JSON elements, decimals, order."""
