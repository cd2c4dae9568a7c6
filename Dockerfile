# The laptop trainer, without CUDA: docker build -t groundwire . && docker run -it groundwire run --ci-fast
FROM python:3.12-slim

WORKDIR /app
COPY requirements/train.txt requirements/
# torch first and by itself, from the index of its wheels for CPUs; then the locked versions of everything else.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/train.txt)" \
    && grep -vE '^(nvidia-|cuda-|triton|torch==)' requirements/train.txt > cpu.txt \
    && pip install --no-cache-dir -r cpu.txt
COPY . .
RUN pip install --no-cache-dir --no-deps -e .

ENTRYPOINT ["groundwire"]
CMD ["--help"]
