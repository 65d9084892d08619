"""What `report_to` leaves beside metrics.jsonl, read by readers of their own: also after a resume."""

import csv
import struct
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent))

from training import Training, metrics  # noqa: E402

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None

PROGRAM = sys.argv.pop(1)
EVALUATED = [3, 6, 9, 10]  # every third step, and the last


def crc32c(data):
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    data = path.read_bytes()
    at = 0
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        event = data[at + 12:at + 12 + length]
        (event_crc,) = struct.unpack_from("<I", data, at + 12 + length)
        assert masked(data[at:at + 8]) == length_crc and masked(event) == event_crc, f"{path}: checksum at {at}"
        yield event
        at += 16 + length


def fields(message):
    """(number, value) of Protocol Buffers' wire format: int, bytes, or raw bytes of fixed-width numbers."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: None, 5: 4}[key & 7]
        if size is None:
            size = varint()
        yield key >> 3, message[at:at + size]
        at += size


def scalars(folder):
    """{tag: {step: value}} of a folder's event files, by age; a START forgets its step and later ones."""
    found = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name.split(".")[3]):
        events = [dict(fields(record)) for record in records(path)]
        assert events[0][3] == b"brain.Event:2"
        for event in events[1:]:
            step = event.get(2, 0)
            if dict(fields(event.get(7, b""))).get(1) == 1:
                for values in found.values():
                    for later in [other for other in values if other >= step]:
                        del values[later]
            for _, value in fields(event.get(5, b"")):
                value = dict(fields(value))
                found.setdefault(value[1].decode(), {})[step] = struct.unpack("<f", value[2])[0]
    return found


class ReportFilesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        training = Training(PROGRAM, Path(cls.folder.name))
        both = {"report_to": "[csv, tensorboard]", "validation_file": training.held_out, "eval_strategy": "steps",
                "eval_steps": 3, "max_eval_samples": 2}
        cls.run_folder = training.train("out", max_steps=8, save_steps=5, **both)
        # Without its last checkpoint the run goes on after step 5, and repeats three steps.
        for path in sorted((cls.run_folder / "checkpoint-8").iterdir()):
            path.unlink()
        (cls.run_folder / "checkpoint-8").rmdir()
        training.train("out", max_steps=10, save_steps=5, resume_from_checkpoint=cls.run_folder / "checkpoint-5", **both)
        cls.steps, cls.evaluations = metrics(cls.run_folder)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_the_resumed_run_has_every_step_once(self):
        self.assertEqual([line["step"] for line in self.steps], list(range(1, 11)))
        self.assertEqual([line["step"] for line in self.evaluations], EVALUATED)

    def test_csv_says_what_metrics_jsonl_says(self):
        with (self.run_folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        for lines, marker in ((self.steps, "loss"), (self.evaluations, "eval_loss")):
            of_kind = [row for row in rows if row[marker]]
            self.assertEqual(len(of_kind), len(lines))
            for row, line in zip(of_kind, lines):
                for name, value in line.items():
                    expected = str(value).lower() if isinstance(value, bool) else float(value)
                    self.assertEqual(row[name] if isinstance(value, bool) else float(row[name]), expected, name)

    def test_event_files_hold_the_same_scalars_with_right_checksums(self):
        folder = self.run_folder / "tensorboard"
        self.assertEqual(len(list(folder.iterdir())), 2)
        found = scalars(folder)
        tags = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "learning_rate",
                "train/epoch": "epoch"}
        for tag, name in tags.items():
            expected = {line["step"]: struct.unpack("<f", struct.pack("<f", line[name]))[0] for line in self.steps}
            self.assertEqual(found[tag], expected, tag)
        self.assertEqual(sorted(found["eval/loss"]), EVALUATED)

    @unittest.skipIf(EventAccumulator is None, "the Python package tensorboard is not installed")
    def test_tensorboard_reads_them(self):
        accumulator = EventAccumulator(str(self.run_folder / "tensorboard"))
        accumulator.Reload()
        read = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
        self.assertEqual([step for step, _ in read], list(range(1, 11)))
        for (_, value), line in zip(read, self.steps):
            self.assertAlmostEqual(value, line["loss"], delta=1e-6 * abs(line["loss"]))
        self.assertEqual([event.step for event in accumulator.Scalars("eval/loss")], EVALUATED)


if __name__ == "__main__":
    unittest.main()
