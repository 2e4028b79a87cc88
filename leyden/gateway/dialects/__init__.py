"""Client-facing wire APIs. Each module translates one to and from the internal request and answer of `base`."""
