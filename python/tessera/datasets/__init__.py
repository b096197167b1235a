"""The module paths of torchrec.datasets: batches of clicks."""
