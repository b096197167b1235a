"""Graph parallelism under the reference's module path."""
