"""Ranks of these tests find torchrec there already: to import it takes each of them more than a second."""

import importlib.util
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import ranks

if importlib.util.find_spec("torchrec"):
    ranks.preload("torchrec", "torchrec.distributed.model_parallel", "torchrec.distributed.train_pipeline")
