"""Adagrad with one number of state per row, for any parameter of two dimensions."""

from tessera.optim._optimizers import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]
