# The command line in an image. Build the wheel first: make wheels && docker build --tag memascend .
#
#   docker run --rm --volume /nvme/run1:/store --volume "$PWD":/work --user "$(id -u):$(id -g)" --ulimit memlock=-1 \
#       memascend finetune path/to/hf_model --data src/ --store /store --host-memory 8GiB --out tuned/
#
# Docker's default seccomp profile refuses io_uring: threads move the bytes in its place. Nothing here needs privileges.
FROM python:3.12-slim-bookworm

# Of x86-64 and of arm64: the machine's own is installed.
COPY dist/release/memascend-*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/memascend-*_$(uname -m).whl)[cli]" && rm /tmp/memascend-*.whl

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
