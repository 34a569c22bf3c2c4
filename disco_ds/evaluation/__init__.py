"""Zero-shot classification and retrieval, shared by all ranks under every strategy."""
