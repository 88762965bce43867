"""Programs as operations of JAX: their derivatives, their batching, their sharding."""
