"""The logits of a Checkpoint by onnxruntime."""

from pathlib import Path

import numpy as np
import onnxruntime


def logits_of_graph(checkpoint: Path, ids: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(checkpoint / "model.onnx", providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"input_ids": ids})[0]
    return result
