"""What computes what: devices found and opened, plans made and chosen."""
