# syntax=docker/dockerfile:1
# Overture in a container. Two targets:
#   docker build --target cpu  -t overture .          (also what a plain `docker build .` makes)
#   docker build --target cuda -t overture:cuda .     (needs an NVIDIA driver and its container toolkit on the host)
# docs/deploy.md says how to run them. `make dockerfile` lints this file and runs its steps without Docker.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# -- what both devices share: the user, the folders, how the server starts, is watched and is stopped -------------------
FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/overture/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    HF_HOME=/data/hub \
    XDG_CACHE_HOME=/data/cache \
    XDG_CONFIG_HOME=/data/config \
    VLLM_NO_USAGE_STATS=1 \
    OVERTURE_HOST=0.0.0.0 \
    OVERTURE_PORT=8000 \
    OVERTURE_DATA_DIR=/data/overture
RUN groupadd --gid 10001 overture \
    && useradd --uid 10001 --gid overture --home-dir /data --no-create-home --shell /usr/sbin/nologin overture \
    && install --directory --owner overture --group overture --mode 0700 /data
WORKDIR /app
VOLUME /data
EXPOSE 8000
# /health answers 503 until the engine has started, which takes a minute and, with a large model, several.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "gateway.commands.health_check"]
# SIGTERM lets running answers finish for 30 s (--drain-timeout-s), so give `docker stop` a longer time than its 10 s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["overture"]
CMD ["serve"]

# -- the pinned packages, in layers of their own that a change of our code leaves alone --------------------------------
# Compiled here, since the server's user cannot write compiled files later and every start would take a minute.
FROM base AS packages-cpu
ARG TORCH_VERSION=2.13.0
ARG TORCHVISION_VERSION=0.28.0
# Has the CPU build of torch, which pip's own index does not. Name a mirror of yours here if you have one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/cpu.txt requirements/cpu.txt
RUN python -m venv /opt/overture \
    && pip install --no-deps --only-binary :all: --index-url "${TORCH_INDEX}" \
        "torch==${TORCH_VERSION}+cpu" "torchvision==${TORCHVISION_VERSION}"
RUN pip install --no-deps --only-binary :all: --require-hashes -r requirements/cpu.txt

FROM base AS packages-cuda
COPY requirements/cuda.txt requirements/cuda.txt
RUN python -m venv /opt/overture && pip install -r requirements/cuda.txt

# -- our code: only what .dockerignore lets through ---------------------------------------------------------------------
FROM base AS source
COPY README.md LICENSE pyproject.toml setup.py ./
COPY demo demo
COPY static static
COPY requirements/cpu.in requirements/cuda.in requirements/ray.in requirements/
COPY kvtiers kvtiers
COPY engine_bridge engine_bridge
COPY overture_client overture_client
COPY gateway gateway

# -- the images -----------------------------------------------------------------------------------------------------------
FROM base AS cuda
# Triton compiles its launchers with gcc at run time; vLLM loads libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /opt/overture /opt/overture
COPY --from=source /app /app
RUN pip install --no-deps --no-build-isolation --editable ./overture_client --editable .
ENV OVERTURE_DEVICE=cuda
USER 10001:10001

FROM base AS cpu
# vLLM's kernels load libnuma. Its version comes with the base image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cpu /opt/overture /opt/overture
COPY --from=source /app /app
RUN pip install --no-deps --no-build-isolation --editable ./overture_client --editable .
ENV OVERTURE_DEVICE=cpu
USER 10001:10001
