"""The policy server: batched inference with versioned weights over gRPC."""
