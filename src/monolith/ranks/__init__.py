"""Synchronous training over ranks: tables spread over the training processes, which exchange rows in every step."""
