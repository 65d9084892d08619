"""Copies of a hardware profile with other rates of the link and of host memory, and what a profile says."""

import dataclasses
import re
from typing import Dict, List, Tuple

ADAMW_BYTES = 28  # of memory traffic a parameter: gradient 4 read, two halves and two moments 12 read and written
_RATE = r"^  {key}: {{value: (\S+), source: \"(.*)\"}}$"
_LINK = (
    "to_device_bytes_per_second",
    "to_host_bytes_per_second",
    "kernel_read_bytes_per_second",
    "kernel_write_bytes_per_second",
    "adamw_in_place_parameters_per_second",
)


@dataclasses.dataclass(frozen=True)
class Profile:
    """The text of a profile, and its numbers by `section.key`."""

    text: str

    def value(self, section: str, key: str) -> float:
        return float(self._find(section, key)[0].group(1))

    def curve(self, section: str, key: str, size: str) -> List[Tuple[float, float]]:
        begin = re.search(rf"^  {key}:\n", self._section(section)[0], re.MULTILINE)
        if begin is None:
            raise ValueError(f"the profile has no curve {section}.{key}")
        points = []
        for line in self._section(section)[0][begin.end() :].splitlines():
            point = re.match(rf"    - {{{size}: (\S+), value: ([^,]+), ", line)
            if point is None:
                break
            points.append((float(point.group(1)), float(point.group(2))))
        return points

    def with_values(self, name: str, values: Dict[Tuple[str, str], float], why: str) -> "Profile":
        """@param values by section and key; others stay. Each says in its source `why` it is no longer the number
        before."""
        text = re.sub(r"^name: .*$", f"name: {name}", self.text, count=1, flags=re.MULTILINE)
        changed = Profile(text)
        for (section, key), value in values.items():
            found, offset = changed._find(section, key)
            line = f'  {key}: {{value: {value:.6g}, source: "estimate: {why}"}}'
            changed = Profile(changed.text[: offset + found.start()] + line + changed.text[offset + found.end() :])
        return changed

    def _section(self, section: str) -> Tuple[str, int]:
        found = re.search(rf"^{section}:\n((?:  .*\n|\n)*)", self.text, re.MULTILINE)
        if found is None:
            raise ValueError(f"the profile has no section {section}")
        return found.group(1), found.start(1)

    def _find(self, section: str, key: str):
        text, offset = self._section(section)
        found = re.search(_RATE.format(key=key), text, re.MULTILINE)
        if found is None:
            raise ValueError(f"the profile has no rate {section}.{key}")
        return found, offset


def _shared(total: float, optimizer: float, copies: float) -> Tuple[float, float]:
    """Of host memory's rate `total`, what each gets that would take as much alone: in proportion."""
    part = min(1.0, total / (optimizer + copies))
    return part * optimizer, part * copies


def scaled(profile: Profile, c2c: float, lpddr: float) -> Profile:
    """With NVLink-C2C and LPDDR `c2c` and `lpddr` times as fast.

    What crosses the link also reads or writes LPDDR, so that it goes with the smaller of the two: the shipped rates
    are near both limits at once. Both directions together are LPDDR's, as long as the link carries them. What the
    host's update and copies leave each other is shared as in the shipped profile."""
    if (c2c, lpddr) == (1.0, 1.0):
        return profile
    values = {("link", key): min(c2c, lpddr) * profile.value("link", key) for key in _LINK}
    both = values["link", _LINK[0]] + values["link", _LINK[1]]
    values["link", "duplex_bytes_per_second"] = min(lpddr * profile.value("link", "duplex_bytes_per_second"), both)

    triad = profile.value("host", "triad_bytes_per_second")
    adamw = profile.value("host", "adamw_parameters_per_second")
    before = _shared(
        triad, ADAMW_BYTES * adamw, (profile.value("link", _LINK[0]) + profile.value("link", _LINK[1])) / 2.0
    )
    after = _shared(lpddr * triad, ADAMW_BYTES * lpddr * adamw, both / 2.0)
    values["host", "triad_bytes_per_second"] = lpddr * triad
    values["host", "adamw_parameters_per_second"] = lpddr * adamw
    for key, now, then in zip(
        ("adamw_beside_copies_parameters_per_second", "copies_beside_adamw_bytes_per_second"), after, before
    ):
        values["host", key] = profile.value("host", key) * now / then
    name = re.search(r"^name: (.*)$", profile.text, re.MULTILINE).group(1)
    return profile.with_values(
        f"{name}-c2c-{c2c:g}-lpddr-{lpddr:g}",
        values,
        f"the rate of {name}, with NVLink-C2C {c2c:g} and LPDDR {lpddr:g} times as fast",
    )
