"""Engines: servers that continue token ids. Token ids go in, token ids with log-probs and versions come out."""
