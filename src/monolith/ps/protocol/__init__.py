"""What clients and parameter servers say to each other: calls, messages, ownership and precision."""
