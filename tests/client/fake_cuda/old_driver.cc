// A CUDA driver that is too old for the clients: libcuda.so.1 without most of its functions.
extern "C" int cuInit(unsigned /*flags*/) { return 0; }
