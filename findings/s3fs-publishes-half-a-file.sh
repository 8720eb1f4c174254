#!/bin/sh
# s3fs and fsspec 2026.9.0 and boto3 1.43.117 from PyPI, against moto 5.2.5, which speaks S3.
#
# Guess: an object is there whole or not at all, so a program that fails inside of `with fs.open(path, "wb") as file:`
# leaves the object as it was, as boto3's `upload_fileobj` does when its source fails.
# Seen: the exception closes the file, and closing uploads what was written until then: a part of the new text, as an
# object like any other, in place of the whole old one. So it is with large files, whose parts are put together.
# Inside of `with fs.transaction:` the old object stays.
# For users: a job that is cancelled or meets a bad line publishes a part of its results, and the next step finds a
# file that looks complete. Write within a transaction, or under a new name that others learn only when the file
# is whole, as the fleet does with the files of batches.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  s3fs==2026.9.0 "moto[server,s3]==5.2.5" boto3==1.43.117 || exit 2
AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b AWS_DEFAULT_REGION=us-east-1 "$folder/venv/bin/python" - <<'PROGRAM'
import contextlib, logging, shutil
import boto3, moto.server, s3fs

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = moto.server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f"http://{host}:{port}"
files = s3fs.S3FileSystem(endpoint_url=url)
files.mkdir("bucket")
old = b"the old results, whole"

class Failing(Exception):
    pass

class Source:
    """A file to read that fails after so many bytes."""

    def __init__(self, size):
        self._left = size

    def read(self, size=-1):
        if not self._left:
            raise Failing
        size = self._left if size < 0 else min(size, self._left)
        self._left -= size
        return b"." * size

def by_open(size):
    with files.open("bucket/results", "wb") as file:
        shutil.copyfileobj(Source(size), file)

def by_transaction(size):
    with files.transaction:
        by_open(size)

def by_boto3(size):
    boto3.client("s3", endpoint_url=url).upload_fileobj(Source(size), "bucket", "results")

seen = {}
for name, write in {"open": by_open, "transaction": by_transaction, "boto3": by_boto3}.items():
    for size in (4, 16 << 20):
        files.pipe("bucket/results", old)
        with contextlib.suppress(Failing):
            write(size)
            raise SystemExit(2)
        found = s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True).cat("bucket/results")
        seen[name, size] = "as it was" if found == old else f"{len(found)} bytes of the new one"
        print(f"failed by {name} after {size} bytes: the object is {seen[name, size]}")
server.stop()
kept = {key: text == "as it was" for key, text in seen.items()}
raise SystemExit(0 if kept == {(name, size): name != "open" for name, size in seen} else 1)
PROGRAM
