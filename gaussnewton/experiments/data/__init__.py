"""The paper's three data sets (section 5): CURVES, MNIST and FACES, and batches of them."""

from gaussnewton.experiments.data.batching import Batches, batches
from gaussnewton.experiments.data.dataset import NAMES, DataSet, load
from gaussnewton.experiments.data.digits import mnist
from gaussnewton.experiments.data.drawing import curves
from gaussnewton.experiments.data.portraits import faces

__all__ = ["NAMES", "Batches", "DataSet", "batches", "curves", "faces", "load", "mnist"]
