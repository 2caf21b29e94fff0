// Marks for code that runs on the host and on devices.
#pragma once

#if defined(__CUDACC__)
#define BD_HOST_DEVICE __host__ __device__
#else
#define BD_HOST_DEVICE
#endif
