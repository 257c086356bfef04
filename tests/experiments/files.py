"""Small files in the formats of the data sets, and a web server that hands them out."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import scipy.io
import torch
from torch import Tensor

from gaussnewton.experiments.data.idx import decode_idx
from gaussnewton.experiments.data.matlab import decode_faces
from gaussnewton.experiments.data.source import Mirror, Source


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def idx(values: Tensor) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + bytes(values.flatten().tolist())


def mat(images: Tensor) -> bytes:
    """Images ``[count, 64, 64]`` as MATLAB's ``faces``: columns, each image column by column."""
    columns = images.numpy().transpose(2, 1, 0).reshape(64 * 64, len(images))
    file = io.BytesIO()
    scipy.io.savemat(file, {"faces": columns, "p": np.ones((1, 40))}, do_compression=True)
    return file.getvalue()


def mat_source(images: Tensor) -> Source:
    content = images.mT.contiguous().numpy().tobytes()
    return Source("olivettifaces.mat", sha256(content), decode_faces)


@dataclass
class Digits:
    """A tiny MNIST."""

    images: Tensor
    labels: Tensor

    @classmethod
    def make(cls, count: int = 7) -> Digits:
        torch.manual_seed(0)
        return cls(
            torch.randint(256, (count, 28, 28), dtype=torch.uint8),
            torch.randint(10, (count,), dtype=torch.uint8),
        )

    def files(self) -> dict[str, bytes]:
        return {
            "train-images-idx3-ubyte.gz": gzip.compress(idx(self.images), mtime=0),
            "train-labels-idx1-ubyte.gz": gzip.compress(idx(self.labels), mtime=0),
        }

    def sources(self, *addresses: str) -> dict[str, Source]:
        """The arguments ``images`` and ``labels``, to be had below these addresses."""
        result = {}
        for key, values in (("images", self.images), ("labels", self.labels)):
            rank = values.ndim
            file = f"train-{key}-idx{rank}-ubyte.gz"
            mirrors = tuple(
                Mirror(f"{address}/{file}", sha256(self.files()[file])) for address in addresses
            )
            result[key] = Source(file, sha256(idx(values)), decode_idx, mirrors)
        return result


@dataclass
class Site:
    """A web server's address, what it has, and what it was asked for."""

    address: str
    files: dict[str, bytes]
    asked: list[str]
    cut: bool = False  # hang up in the middle of a file


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            site.asked.append(name)
            if name not in site.files:
                self.send_error(404)
                return
            data = site.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if site.cut else data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site = Site(f"http://127.0.0.1:{server.server_port}", dict(files), [])
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
