# Two images, installed from wheels without a network: `make images` gathers the wheels in dist/wheels and builds both.
# gateway: no torch, SGLang or vLLM runs elsewhere. engine: the exact engine and the trainer, torch.
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 tokentrue && install --directory --owner=tokentrue /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tokentrue"]
CMD ["serve", "--host", "0.0.0.0", "--store", "sqlite:/data/tokentrue.sqlite"]

FROM base AS gateway
# hadolint ignore=DL3013  # the folder has one version of each
RUN --mount=type=bind,source=dist/wheels,target=/wheels \
  pip install --no-cache-dir --no-index --find-links /wheels "tokentrue[gateway,postgres]"
USER 10001
WORKDIR /data

FROM base AS engine
# hadolint ignore=DL3013
RUN --mount=type=bind,source=dist/wheels,target=/wheels \
  pip install --no-cache-dir --no-index --find-links /wheels "tokentrue[train]"
USER 10001
WORKDIR /data
