"""How a device is compared with the reference: cases of every op, random graphs. For authors of backends and ops."""
