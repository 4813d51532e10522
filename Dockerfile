# Two images: `docker build --target gateway .` (no torch: SGLang or vLLM runs elsewhere) and `--target engine` (the exact engine, torch).
# PIP_EXTRA_INDEX_URL chooses another build of torch, such as one without CUDA; the version is the one in constraints.txt.
FROM python:3.12.11-slim-bookworm AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 tokentrue && install --directory --owner=tokentrue /data
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tokentrue tokentrue
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tokentrue"]
CMD ["serve", "--host", "0.0.0.0", "--store", "sqlite:/data/tokentrue.sqlite"]

FROM base AS gateway
RUN pip install --no-cache-dir --constraint constraints.txt ".[gateway,postgres]"
USER 10001
WORKDIR /data

FROM base AS engine
ARG PIP_EXTRA_INDEX_URL=""
RUN pip install --no-cache-dir --constraint constraints.txt ".[train]"
USER 10001
WORKDIR /data
