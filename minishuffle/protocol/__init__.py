"""Credit-based flow control as pure machines: ledgers, channels, connections."""
