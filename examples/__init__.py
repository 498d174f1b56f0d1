"""Programs that use the whole product. They may import every package; no package imports them."""
