"""The frozen target: loading, where its parts live, its features, its fingerprint."""
