# The command line in an image, from a clone: docker build --tag memascend .
#
#   docker run --rm --volume /nvme/run1:/store --volume "$PWD":/work --user "$(id -u):$(id -g)" --ulimit memlock=-1 \
#       memascend finetune path/to/hf_model --data src/ --store /store --host-memory 8GiB --out tuned/
#
# Docker's default seccomp profile refuses io_uring: threads move the bytes in its place. Nothing here needs privileges.
FROM rust:1-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/maturin \
    && /opt/maturin/bin/pip install --no-cache-dir 'maturin>=1.9,<2'
WORKDIR /memascend
COPY Cargo.toml Cargo.lock pyproject.toml README.md LICENSE THIRD-PARTY-LICENSES ./
COPY crates crates
COPY python python
RUN /opt/maturin/bin/maturin build --release --locked --out /dist

FROM python:3.12-slim-bookworm
# PyTorch for the CPU, without the libraries of CUDA; --build-arg TORCH="torch" takes PyPI's, which computes on a GPU too.
ARG TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
# hadolint ignore=SC2086
RUN pip install --no-cache-dir $TORCH
COPY --from=wheel /dist/memascend-*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/memascend-*.whl)[cli]" && rm /tmp/memascend-*.whl

# Any user can run it, since nothing is written but to the two mounts and to HOME.
RUN useradd --create-home --uid 1000 memascend \
    && mkdir /store /work \
    && chown memascend: /store /work \
    && chmod 0777 /home/memascend
ENV HOME=/home/memascend
USER memascend
WORKDIR /work
ENTRYPOINT ["memascend"]
CMD ["--help"]
