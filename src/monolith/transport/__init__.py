"""Frames between processes: sockets, Arrow Flight, deadlines, errors that travel. What is in a frame is others' business."""
