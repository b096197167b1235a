"""The types of sharding taken apart: what sends ids, what looks them up, what sends rows home."""
