"""Durable state: what was acknowledged survives a kill. `base.Store` is the interface, `sqlite` the default."""
