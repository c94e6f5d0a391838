"""What an engine computes, as a number: equal for engines that give the same bits, however ranks divide the model."""

import hashlib
import json

from ingot.checkpoint import Checkpoint
from ingot.configs.read import write_record
from ingot.plan import Plan


def program_digest(whole: Plan) -> str:
    """SHA-256 of the steps, what they read, and the caches. Limits, times of kernels, and where things lie change no
    bit.

    whole: the plan of one rank that has everything
    """
    read = {name for step in whole.steps for name in step.inputs}
    document = {
        "steps": write_record(whole.steps),
        "buffers": [(each.name, each.cols, each.dtype.value) for each in whole.buffers],
        "weights": [(each.name, each.dtype.value, each.shape) for each in whole.weights if each.name in read],
        "caches": write_record(whole.caches),
        "sum_parts": whole.sum_parts,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of the graph, and of the checksums of the files with weights, which are checked as these are read."""
    sums = {name: (each.nbytes, each.crc32) for name, each in checkpoint.config.weights.items()}
    digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode())
    digest.update(checkpoint.graph_path.read_bytes())
    return digest.hexdigest()
