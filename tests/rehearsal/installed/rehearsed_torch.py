"""PyTorch on the stand-in device: the CPU computes its CUDA operators, and other features are turned off."""

import ctypes
import os


def install(torch):
    """Change PyTorch, which has just been imported."""
    library = ctypes.CDLL(os.path.join(os.environ["REHEARSAL"], "librehearsal-operators.so"))
    with _without_warnings():
        library.rehearse_operators()
    # Attention by products of matrices, a path that the CPU has for tensors of the device too.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    # There is no CUPTI without a driver.
    cpu = {torch._C._profiler.ProfilerActivity.CPU}
    torch.autograd._supported_activities = lambda: cpu
    torch.cuda._sleep = lambda cycles: _sleep(torch)


def _sleep(torch):
    """Have the current stream be busy until the host waits for the stream, however many cycles were asked for."""
    ctypes.CDLL(os.environ["MEMASCEND_CUDART"]).fake_sleep(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


class _without_warnings:
    """PyTorch writes a warning for each operator that is registered anew, from C++."""

    def __enter__(self):
        self._kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_):
        os.dup2(self._kept, 2)
        os.close(self._kept)
