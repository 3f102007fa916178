from storing import target, whole  # noqa: F401
