"""The server of the Open Inference Protocol v2: HTTP and gRPC over one handler."""
