"""tools/long_documents.py: one document a package, in order, complete, and its length."""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

import long_documents  # noqa: E402


class LongDocumentsTest(unittest.TestCase):
    def test_a_package_becomes_one_document_of_its_modules_in_order(self):
        with tempfile.TemporaryDirectory() as folder:
            library, output = Path(folder) / "library", Path(folder) / "output"
            for path, data in (
                ("pack/__init__.py", b"first"),
                ("pack/deep/zed.py", "d\u00e9p\u00f4t".encode()),
                ("pack/latin.py", b"caf\xe9"),
                ("pack/binary.py", b"\0"),
                ("small/__init__.py", b""),
                ("test/__init__.py", b"x" * 1000),
                ("no_package/module.py", b"y" * 1000),
            ):
                (library / path).parent.mkdir(parents=True, exist_ok=True)
                (library / path).write_bytes(data)
            arguments = ["x", "--output", str(output), "--library", str(library), "--min-tokens", "50"]
            with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(io.StringIO()) as out:
                with contextlib.redirect_stderr(io.StringIO()) as errors:
                    long_documents.main()
            written = {path.name: path.read_bytes() for path in output.iterdir()}
        text = "# ==== pack/__init__.py ====\nfirst\n# ==== pack/deep/zed.py ====\nd\u00e9p\u00f4t\n".encode()
        self.assertEqual(written, {"pack.txt": text})
        self.assertIn(f"{len(text) + 1} tokens  pack\n", out.getvalue())
        self.assertEqual(errors.getvalue().count("left out"), 2)


if __name__ == "__main__":
    unittest.main()
