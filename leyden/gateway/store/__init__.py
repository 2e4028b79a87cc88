"""Durable state: what was acknowledged survives a kill. `base.open_store` opens it."""
