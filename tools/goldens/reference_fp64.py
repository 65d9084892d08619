"""Runs Hugging Face decoders in true double precision.

`model.double()` alone does not: the modules cast to float32 for norm statistics, softmax and rope. `Fp64Mode`
turns each of these casts into one to float64 while it is active, and fails on any float32 result that slips
through. Build the model inside the mode as well, so that the rope frequencies are exact.
"""

import torch
from torch.overrides import TorchFunctionMode

_DTYPE_ARGUMENT_FUNCTIONS = {torch.Tensor.to, torch.arange, torch.nn.functional.softmax, torch.tensor}


def _widened(value):
    return torch.float64 if value is torch.float32 else value


class Fp64Mode(TorchFunctionMode):
    def __enter__(self):
        self._default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.set_default_dtype(self._default_dtype)
        return super().__exit__(*exception)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        if function in _DTYPE_ARGUMENT_FUNCTIONS:
            args = tuple(_widened(a) for a in args)
            kwargs = {key: _widened(value) for key, value in kwargs.items()}
        result = function(*args, **kwargs)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and item.dtype in (torch.float32, torch.bfloat16, torch.float16):
                raise AssertionError(f"{function} made a {item.dtype} tensor in a double-precision run")
        return result
