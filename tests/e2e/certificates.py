"""Certificates for tests, made with the openssl command."""

import datetime
import hashlib
import os
import pathlib
import subprocess

CONFIG = """
[ca]
default_ca = it
[it]
database = {folder}/index.txt
new_certs_dir = {folder}
certificate = {folder}/ca.pem
private_key = {folder}/ca.key
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
rand_serial = yes
[any]
commonName = supplied
"""
DAY = datetime.timedelta(days=1)


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def new_key(path):
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)


class Authority:
    """A CA with files in `folder`."""

    def __init__(self, folder, name="ca"):
        self.folder = pathlib.Path(folder, name)
        self.folder.mkdir()
        self.file = self.folder / "ca.pem"
        self.config = self.folder / "config"
        self.config.write_text(CONFIG.format(folder=self.folder))
        (self.folder / "index.txt").touch()
        new_key(self.folder / "ca.key")
        openssl("req", "-x509", "-new", "-key", self.folder / "ca.key", "-subj", f"/CN={name}",
                "-days", "2", "-out", self.file)

    def issue(self, name, san="IP:127.0.0.1", begin=-DAY, end=DAY):
        """(certificate, key): the files of a new certificate, valid from now + begin to now + end."""
        stem = self.folder / f"{name.replace('/', '_')}-{os.urandom(4).hex()}"
        key, request, certificate = (stem.with_suffix(s) for s in (".key", ".csr", ".pem"))
        new_key(key)
        extension = ["-addext", f"subjectAltName={san}"] if san else []
        openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", *extension, "-out", request)
        now = datetime.datetime.now(datetime.timezone.utc)
        openssl("ca", "-batch", "-notext", "-config", self.config, "-in", request, "-out", certificate,
                "-startdate", (now + begin).strftime("%Y%m%d%H%M%SZ"),
                "-enddate", (now + end).strftime("%Y%m%d%H%M%SZ"))
        return certificate, key


class SwappedFolder:
    """Files that are replaced together, as Kubernetes mounts a Secret: NAME is a link to ..data/NAME,
    and ..data a link to a folder that a rename replaces."""

    def __init__(self, folder, **contents):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir()
        self.version = 0
        self.write(**contents)
        for name in contents:
            (self.folder / name).symlink_to(pathlib.Path("..data", name))

    def __truediv__(self, name):
        return self.folder / name

    def write(self, **contents):
        """Replaces all files: by name, their content."""
        self.version += 1
        new = self.folder / f"..{self.version}"
        new.mkdir()
        for name, content in contents.items():
            (new / name).write_bytes(content)
        link = self.folder / "..next"
        link.symlink_to(new.name)
        link.rename(self.folder / "..data")


def token_line(name, token, groups=""):
    return f"{name}:{hashlib.sha256(token.encode()).hexdigest()}:{groups}\n"
