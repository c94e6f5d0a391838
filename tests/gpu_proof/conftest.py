"""The emulated GPU, as tests of CUDA have it."""

from tests.plugins.cuda.conftest import emulation as emulation
from tests.plugins.cuda.conftest import gpu as gpu
from tests.plugins.cuda.conftest import real_context as real_context
