"""Processors with one protocol: `Device`, `Kernel`, `BoundCall`, `Completion`.

Nothing is probed or imported from a vendor until a device is opened
(`hetero.backends.registry.open_device`).
"""
