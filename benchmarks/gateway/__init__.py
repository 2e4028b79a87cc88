"""Parts of `make bench-gateway`: a light engine, a light client, the peer."""
