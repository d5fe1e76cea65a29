"""Control plane: the coordinator, its workers, and RPC between them."""
