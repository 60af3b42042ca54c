# The core's libraries out of LOWKV_CORE, another build folder of these sources, which has compiled them.
file(GLOB lowkv_guests_include "${PROJECT_SOURCE_DIR}/guests/*/include")
foreach(library lowkv lowkv_filters lowkv_calibrate lowkv_calibration_files)
    add_library(${library} STATIC IMPORTED)
    set_target_properties(${library} PROPERTIES
        IMPORTED_LOCATION "${LOWKV_CORE}/lib/${CMAKE_STATIC_LIBRARY_PREFIX}${library}${CMAKE_STATIC_LIBRARY_SUFFIX}"
        INTERFACE_INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/include;${lowkv_guests_include}")
    string(REPLACE "lowkv_" "" name ${library})
    add_library(lowkv::${name} ALIAS ${library})
endforeach()
target_link_libraries(lowkv INTERFACE Threads::Threads $<$<PLATFORM_ID:Windows>:synchronization>)
target_link_libraries(lowkv_filters INTERFACE lowkv)
target_link_libraries(lowkv_calibrate INTERFACE lowkv)
target_link_libraries(lowkv_calibration_files INTERFACE lowkv)
