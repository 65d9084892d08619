"""Arithmetic: when a kernel that reads host memory by itself beats a copy to the device made before ("promotion").

Nothing here is simulated. A product that reads its matrix from the host reads it at least once for each chunk of
tokens, if its tiles find the rest in the L2 cache; that best case is assumed. Promotion is once a pass and runs beside
the computation of the block before.
"""

import dataclasses
import math
from typing import List, Sequence, Tuple

from scaled_profile import ADAMW_BYTES, Profile
from tables import table

STATE_BYTES = 12  # a parameter: two halves of 2, two moments of 4


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    query_heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    head_size: int = 128

    @property
    def layer_matrices(self) -> int:
        """Elements of a decoder layer's matrices."""
        attention = 2 * self.hidden * (self.query_heads + self.key_value_heads) * self.head_size
        return attention + 3 * self.hidden * self.intermediate

    @property
    def table_bytes(self) -> int:
        """Of the embedding in bf16."""
        return 2 * self.vocabulary * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("7B", 28, 3584, 28, 4, 18944, 152064),  # Qwen2.5
        Shape("14B", 48, 5120, 40, 8, 13824, 152064),
        Shape("32B", 64, 5120, 40, 8, 27648, 152064),
        Shape("8B", 32, 4096, 32, 8, 14336, 128256),  # Llama 3.1
        Shape("70B", 80, 8192, 64, 8, 28672, 128256),
    )
}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes a second, but for products (FLOP/s by tokens) and the update in place (parameters a second, with gradients
    on the host)."""

    copy_in: float
    copy_out: float
    copy_both: float
    kernel_read: float
    kernel_write: float
    in_place: float
    products: Sequence[Tuple[float, float]]

    @staticmethod
    def of(profile: Profile) -> "Rates":
        def link(key: str) -> float:
            return profile.value("link", key)

        return Rates(
            copy_in=link("to_device_bytes_per_second"),
            copy_out=link("to_host_bytes_per_second"),
            copy_both=link("duplex_bytes_per_second"),
            kernel_read=link("kernel_read_bytes_per_second"),
            kernel_write=link("kernel_write_bytes_per_second"),
            in_place=link("adamw_in_place_parameters_per_second"),
            products=profile.curve("device", "bf16_gemm_flops_per_second", "tokens"),
        )

    def product(self, tokens: float) -> float:
        """As HardwareProfile's curves: linear in the logarithm of the size, level beyond the ends."""
        points = self.products
        if tokens <= points[0][0]:
            return points[0][1]
        for (a, low), (b, high) in zip(points, points[1:]):
            if tokens <= b:
                return low + math.log(tokens / a) / math.log(b / a) * (high - low)
        return points[-1][1]


# --- rows of an embedding ---


def gather_seconds(shape: Shape, rates: Rates, tokens: int) -> float:
    """A row for each token, used before or not."""
    return 2.0 * shape.hidden * tokens / rates.kernel_read


def promote_table_seconds(shape: Shape, rates: Rates) -> float:
    return shape.table_bytes / rates.copy_in


def equal_tokens(shape: Shape, rates: Rates) -> float:
    """So many tokens a step gather as long as the table takes."""
    return shape.vocabulary * rates.kernel_read / rates.copy_in


# --- matrices of a layer ---


@dataclasses.dataclass(frozen=True)
class LayerPasses:
    """Seconds of a layer's products, forward and backward (which repeats the forward products and adds as many again
    for the input's and for the weights' gradient), over `chunks` chunks."""

    computing: float
    promoted: float
    direct: float


def layer_passes(shape: Shape, rates: Rates, chunk: int, chunks: int) -> LayerPasses:
    matrices = float(shape.layer_matrices)
    products = 2.0 * matrices * chunk / rates.product(chunk)  # each matrix once
    promotion = 2.0 * matrices / rates.copy_in
    reading = max(products, 2.0 * matrices / rates.kernel_read)
    return LayerPasses(
        computing=chunks * 4.0 * products,
        # A pass takes as long as the slower of its copy, once, and its products.
        promoted=max(promotion, chunks * products) + max(promotion, chunks * 3.0 * products),
        # The weights' gradient reads no weights.
        direct=chunks * (3.0 * reading + products),
    )


def hidden_reading_tokens(rates: Rates) -> float:
    """From so many tokens a chunk on, reading a matrix once takes no longer than the product with it."""
    low, high = 1.0, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle / rates.product(middle) < 1.0 / rates.kernel_read else (low, middle)
    return high


# --- the optimizer's state ---


@dataclasses.dataclass(frozen=True)
class UpdateBound:
    gradients: str  # device, host
    staged: float  # parameters a second that the copies permit
    in_place: float  # that reading and writing at the kernels' rate permits
    profile: float  # what the profile's rate of the update in place comes to


def update_bounds(rates: Rates) -> List[UpdateBound]:
    bounds = []
    for home, gradient in (("device", 0), ("host", 4)):
        into, out = STATE_BYTES + gradient, STATE_BYTES
        bounds.append(
            UpdateBound(
                gradients=home,
                staged=min(rates.copy_in / into, rates.copy_out / out, rates.copy_both / (into + out)),
                in_place=min(rates.kernel_read / (into + out), rates.kernel_write / out),
                profile=rates.in_place * ADAMW_BYTES / (into + out),  # it goes with the bytes
            )
        )
    assert 2 * STATE_BYTES + 4 == ADAMW_BYTES
    return bounds


# --- the page ---


def report(models: Sequence[Shape], rates: Rates) -> str:
    """Three tables with what they say; matrices of the first model."""
    gathers = [
        [
            shape.name,
            f"{1e-9 * shape.table_bytes:.2f}",
            f"{1e3 * promote_table_seconds(shape, rates):.2f}",
            *(f"{1e3 * gather_seconds(shape, rates, tokens):.3f}" for tokens in (2048, 8192, 65536)),
            f"{equal_tokens(shape, rates):,.0f}",
        ]
        for shape in models
    ]
    shape, step = models[0], 8192
    passes = []
    for chunk in (256, 512, 1024, 2048, 4096, 8192):
        one = layer_passes(shape, rates, chunk, 1)
        all_of_step = layer_passes(shape, rates, chunk, step // chunk)
        passes.append(
            [f"{chunk:,}"]
            + [f"{1e3 * value:.2f}" for value in (one.computing, one.promoted, one.direct)]
            + [f"{1e3 * value:.2f}" for value in (all_of_step.computing, all_of_step.promoted, all_of_step.direct)]
        )
    updates = [
        [of.gradients, *(f"{1e-9 * value:.1f}" for value in (of.staged, of.in_place, of.profile))]
        for of in update_bounds(rates)
    ]
    gather_header = ("model", "table, GB", "promoted, ms", "2,048 tokens, ms", "8,192, ms", "65,536, ms")
    gather_header += ("equal at tokens a step",)
    pass_header = ("tokens of a chunk", "one chunk: products", "promoted", "direct")
    pass_header += (f"{step:,} tokens: products", "promoted", "direct")
    hidden = hidden_reading_tokens(rates)
    one_copy = 2.0 * shape.layer_matrices / rates.copy_in
    return f"""### Rows of the embedding

A lookup reads one row a token at {1e-9 * rates.kernel_read:.0f} GB/s; promotion copies the table at \
{1e-9 * rates.copy_in:.0f} GB/s. The gradient's rows go out the same way, twice as wide.

{table(gather_header, gathers)}
### Matrices of a layer

Products of one {shape.name} layer ({1e-6 * 2 * shape.layer_matrices:.0f} MB in bf16), forward and backward with the \
forward repeated, ms: the products alone; with one copy a pass beside them (promotion, two slots); with every product \
reading its matrix from the host, once a chunk at best. One chunk is the whole step on the left, a part of {step:,} \
tokens on the right. All three go with the layer's size, so that other models differ by a factor alone.

{table(pass_header, passes)}
Reading once hides below its product from {hidden:,.0f} tokens a chunk on. The first copy of a pass has nothing to hide
below: {1e3 * one_copy:.2f} ms, which direct reading would save. Two slots would be saved too.

### The optimizer's state

G parameters/s that the bytes permit: staged ({STATE_BYTES} bytes in and {STATE_BYTES} out, 4 more in with gradients \
on the host, at the copies' rates, both directions together {1e-9 * rates.copy_both:.0f} GB/s), and in place (the same \
bytes at the kernels' {1e-9 * rates.kernel_read:.0f} GB/s).

{table(("gradients on", "staged", "in place", "in place, as the profile says"), updates)}"""
