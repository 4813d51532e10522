"""The processes and sockets of a gateway: uvicorn within limits, workers, and forwarding among them."""
